"""From micro-batches to the loss: anchors, labels, packing, loss terms, and the fused loss."""
