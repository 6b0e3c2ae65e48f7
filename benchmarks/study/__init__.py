"""The study: the paper's claim on real data, as many runs at a time as one GPU takes, in as many calls as it needs.

plan.py       which runs there are, in the order in which they matter
clock.py      how long a run will take
scheduler.py  ``intbmoe.compare.jobs`` with a deadline: what fits into the time, on a GPU and beside it on cores
job.py        one run, in a process of its own, from a job file to one small summary
timing.py     training steps alone on the device
tables.py     the tables of docs/results/ and README.md; paper.py puts the paper's figures beside them
claims.py     which differences are more than chance; attention.py adds attention's products to early counts
picture.py    the picture of docs/results/
"""
