// Which operators does this library implement? Their schemas, references, fakes and gradients are in megatronish/ops.
#include "activation.binding.h"
#include "cross_entropy.binding.h"
#include "dropout.binding.h"
#include "norm.binding.h"
#include "softmax.binding.h"

// The macros of torch paste names, so ours must be expanded before they see them.
#define MEGATRONISH_IMPL(space, device, library) STABLE_TORCH_LIBRARY_IMPL(space, device, library)
MEGATRONISH_IMPL(MEGATRONISH_NAMESPACE, MEGATRONISH_DEVICE, library) {
  megatronish::bind_activation(library);
  megatronish::bind_cross_entropy(library);
  megatronish::bind_dropout(library);
  megatronish::bind_norm(library);
  megatronish::bind_softmax(library);
}
