"""What mfun's design rests on, checked: theorems (Rocq), and exact exhaustive checks of the code.

`python -m proofs` runs all; see README.md for each claim, what it assumes and what it leaves out.
"""
