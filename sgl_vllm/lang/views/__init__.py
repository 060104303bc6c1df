"""How a run is drawn: `picture` is what there is to see, the others draw it for `view.py`."""
