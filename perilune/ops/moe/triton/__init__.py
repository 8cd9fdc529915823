"""The routed experts, the router and the balancer's histogram in Triton, for a Hopper GPU."""
