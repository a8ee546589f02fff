"""A delivered model for other people's software: a MONAI Bundle, an ONNX file, an nnU-Net model folder."""
