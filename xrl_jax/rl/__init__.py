"""X-RLflow: a policy that rewrites tensor graphs, trained with PPO."""
