"""What surrounds a run: flags, its folder, the comparison with baselines, and pictures.

No number depends on what is here, and nobody needs it to follow a method.
"""
