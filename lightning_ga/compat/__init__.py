"""Every touch of Lightning's and DDP's private parts, one file a part."""
