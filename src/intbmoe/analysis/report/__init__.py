"""Reports: one self-contained HTML page for an analysed run, and one for a comparison.

answer.py               the five lines at the top: what, on what, what won, by how much, how sure
trace.py                where numbers come from, and which runs are too damaged to be in a report
page.py                 what a page consists of, and how it becomes HTML (page.html, page.css, page.js)
images.py               pictures as parts of the page, readable in light and dark
run_report.py           the page of RUN/analysis
comparison.py           what is compared, as data
comparison_pictures.py  its pictures, drawn from the data alone
comparison_report.py    its page
"""
