"""What passes are written with: nodes of graphs, their context, parts of expert layers."""
