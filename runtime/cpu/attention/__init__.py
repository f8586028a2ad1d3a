"""Attention in tiles: the code of its products, of a tile of scores, and of both passes."""
