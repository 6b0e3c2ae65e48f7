"""``intbmoe compare``: train variants of one recipe over seeds, and say how they did and what they cost.

plan.py      which runs there are to be, which of them are finished, which variants the task refuses
jobs.py      the others side by side, each an ordinary run in a process of its own; the study's scheduler too
summary.py   mean and 95 % interval of the deciding metric on the test split; Params, Activated and FLOPs, counted on
             the trained model
table.py     one table of it: terminal, Markdown, CSV, JSON, and the page's
pictures.py  the picture beside the table, and those of the page
answer.py    the five lines at the top of the page: what, on what, what won, by how much, how sure
record.py    what the page shows, as data
page.py      the page
compare.py   all of it in order
"""
