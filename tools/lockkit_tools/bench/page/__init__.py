"""
The report as one page that a person can read alone: no script, nothing from elsewhere, light and dark, wide and narrow.

==========  ==================================================================================
`markup`    HTML and SVG from Python, escaped
`scale`     from values to positions on an axis, and its ticks
`plots`     boxes and bars, one row for each subject
`choice`    which plots each workload gets, and how each is to be read
`page`      the page
==========  ==================================================================================

The plots are rows of HTML with a small SVG in each, whose lengths are shares of whatever width there is. A plotting
library draws one picture of fixed proportions instead: its text shrinks to nothing on a phone, and its colours do not
follow the reader's.
"""
