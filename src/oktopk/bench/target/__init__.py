"""How long until a model is good? Whole trainings under every contender, and what they take on a network.

`contenders.py` says who takes part and how, `training.py` is the work of one rank, `pieces.py` what must be done and is
done already, `replay.py` the arithmetic from steps to time, `results.py` the file of it all, `page.py` the page.
"""
