"""The study tests the paper's claim on real data, with several runs at a time on one GPU, over any number of calls.

plan.py       the runs, in order of importance
clock.py      how long a run will take
scheduler.py  ``intbmoe.compare.jobs`` with a deadline: starts what fits into the time, on a GPU and on spare cores
job.py        one run in a separate process, from a job file to a small summary
timing.py     times training steps alone on the device
tables.py     the tables of docs/results/ and README.md; paper.py adds the paper's figures
claims.py     which differences are more than chance; attention.py adds attention's products to early counts
picture.py    the picture of docs/results/
"""
