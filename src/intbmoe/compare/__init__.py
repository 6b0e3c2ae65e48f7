"""``intbmoe compare``: train variants of one recipe over seeds, and report how well they did and what they cost.

``compare.py`` runs the parts in order: plan, jobs, summary, table and picture, and the page with the answer on top.
"""
