"""What surrounds a run: flags, its folder, the comparison with baselines, and pictures.

Nobody needs it to follow a method. setup.py builds what a method works with, runs.py counts its
rounds, and compare.py says how long a baseline trains; the others only read, print and draw.
"""
