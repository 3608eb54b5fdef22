"""Whether a model gives a prompt the same bits alone and in company, part by part."""
