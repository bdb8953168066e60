"""The dataset layer: from a folder of pictures to checked records, buckets and cached encodings."""
