"""oneDNN as a library of its own: several operators in one call, weights in its layouts."""
