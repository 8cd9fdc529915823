"""How each mechanism works: formula, reference, and numbers and charts computed from a model. Imports nothing by itself."""
