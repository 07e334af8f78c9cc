"""Plain functions from a plan, a comparison or entries of the catalog to what a template shows.

They return plain JSON: text that is ready to read, and positions of shapes as percentages of their picture.
"""
