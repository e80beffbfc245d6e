"""SSD300, a detector, on images with boxes in COCO's layout, or on drawn ones."""
