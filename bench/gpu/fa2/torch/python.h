// In the place of torch's own, which flash_api.cpp includes for its Python module and for all of torch's tensors.
#pragma once
#include <torch/types.h>
