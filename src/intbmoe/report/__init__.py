"""What reports are made of, whoever writes them: ``compare``, ``cost``, ``analyse``, the study.

numbers.py   how numbers are written
tables.py    one table, rendered for the terminal, as Markdown, CSV and JSON, and on a page
page.py      what a page consists of, and how it becomes one HTML file (page.html, page.css, page.js)
canvas.py    one style for all pictures
images.py    pictures as parts of a page, readable in light and dark
trace.py     where numbers come from, and which runs are too damaged to be in a report
"""
