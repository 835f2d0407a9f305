// The backward pass: gradients of query, key and value, recomputing the weights tile by tile.
#pragma once

#include "dropout.h"

namespace levelhead::LEVELHEAD_ISA {

template <class T>
void run_backward(const Problem& p);

}  // namespace levelhead::LEVELHEAD_ISA
