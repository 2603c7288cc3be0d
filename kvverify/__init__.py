"""kvverify: the executable specification of three KV-cache policies, and a gate for the kernels that implement them."""
