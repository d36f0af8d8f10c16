"""Scripts that train the bundled models weft-nano and weft-nano-draft; the serving engine never imports them."""
