"""Charts as SVG, for the pages of `report` and the figures of `bench`; knows numbers and words, nothing of either."""
