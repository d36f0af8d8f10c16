"""What the encoder of pictures, videos and sounds has made, as long as requests need it."""
