"""ResNets on a folder of images, or on synthetic ones."""
