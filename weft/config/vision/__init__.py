"""The encoders of pictures, videos and sounds beside decoders, described by their mechanisms."""
