"""A run as one HTML page that opens without a network."""

from trysquare.lab.report.page import write_report
from trysquare.lab.report.pictures import recipe_images

__all__ = ["recipe_images", "write_report"]
