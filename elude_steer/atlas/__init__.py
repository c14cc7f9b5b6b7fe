"""The product: an atlas of one layer's sub-units, on disk and in memory, and how concepts find sub-units."""
