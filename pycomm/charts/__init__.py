"""Charts: their description (chart.py), drawn as pictures (png.py) and as web pages (page.py).

Pictures need matplotlib, pages plotly: `pip install 'pycomm[bench]'`.
"""

from pycomm.charts.chart import Axis, Chart, Panel, Series
from pycomm.charts.page import Section, save_page
from pycomm.charts.png import picture_digest, save_png

__all__ = [
    "Axis",
    "Chart",
    "Panel",
    "Section",
    "Series",
    "picture_digest",
    "save_page",
    "save_png",
]
