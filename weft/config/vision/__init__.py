"""The encoders of pictures, videos and sounds beside decoders, said in mechanisms."""
