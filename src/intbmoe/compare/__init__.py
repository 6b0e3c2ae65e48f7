"""``intbmoe compare``: train variants of one recipe over seeds, and say how they did and what they cost.

``compare.py`` goes through it in order: plan, jobs, summary, table and picture, and the page with its answer on top.
"""
