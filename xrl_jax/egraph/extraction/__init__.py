"""Extraction: the choice of one e-node for each class that is needed, so that the sum of the costs
of the chosen e-nodes is small. Shared parts count once, and the choice must not contain a cycle.

It is NP-hard (Stepp 2011). Costs of trees, and estimates made of them, cannot see that an e-node is
worth its cost only if several classes read it, as a merged product is: `discounted` shares costs
out among possible readers, `shared` lets classes switch together, `neighbourhoods` solves parts
exactly. `extract` does one after the other.
"""
