"""The report: one page of every committed record, machine by machine, and the accountant.

sections.py      which benchmark answers which question, and what others have published
drawing.py       plots as SVG whose colours follow the page's
markup.py        HTML in which each number says where it comes from
page.py          the page
accountant.py    the figures of the interactive panel, from `vattn.plan`
measuring.py     quick or full runs of the benchmarks on this machine
command.py       python -m bench report
"""
