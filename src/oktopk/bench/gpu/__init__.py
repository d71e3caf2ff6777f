"""All that needs a GPU to be known, in one page to send in."""
