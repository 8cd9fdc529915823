"""Mixture of experts: routing, load balancing, and the experts themselves."""
