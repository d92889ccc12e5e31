// Values: each operator of the simulated device runs as the CPU's kernel on the same bytes, which are the host's.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/native/SparseTensorUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAFunctions.h>
#include <pybind11/stl.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <mutex>
#include <set>

extern "C" void simulated_cuda_operator(const char* name);  // device.cpp

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::IValue;
using torch::jit::Stack;

// These make tensors or views, which is the same on every device, or ask what only CUDA can answer.
const std::set<std::string> NATIVE = {
    "alias", "as_strided", "detach", "empty", "empty_strided", "is_pinned", "is_set_to", "lift", "lift_fresh",
    "record_stream", "resize_", "resize_as_", "set_", "unfold", "view", "view_as_complex", "view_as_real",
    "_efficientzerotensor", "_fused_sdp_choice", "_has_compatible_shallow_copy_type",
    "_new_zeros_with_same_feature_meta", "_pin_memory", "_reshape_alias",
    // sparse: constructors and readers, which compute nothing
    "_coalesced_", "_dimI", "_dimV", "_nnz", "_sparse_coo_tensor_with_dims",
    "_sparse_coo_tensor_with_dims_and_tensors", "dense_dim", "is_coalesced", "sparse_dim",
    "sparse_resize_", "sparse_resize_and_clear_"};
// Operators without a kernel of their own for CUDA: their CPU code would look at the device of the tensors.
const std::set<std::string> SHARED = {"copy_", "_foreach_copy_"};
// Only CUDA has these; they are written out below.
const std::set<std::string> OWN = {"_thnn_fused_lstm_cell", "_thnn_fused_lstm_cell_backward_impl",
                                   "_conv_depthwise2d", "_conv_depthwise2d_backward"};

Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  if (tensor.layout() == at::kSparse)
    return at::_sparse_coo_tensor_unsafe(on_host(tensor._indices()), on_host(tensor._values()), tensor.sizes(),
                                         tensor.options().device(at::kCPU), tensor.is_coalesced());
  if (tensor.layout() != at::kStrided) return tensor;
  auto storage = tensor.storage();
  c10::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(),
                    at::DataPtr(storage.mutable_data(), at::Device(at::kCPU)), nullptr, false);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(std::move(same), c10::DispatchKeySet(DispatchKey::CPU),
                                                        tensor.dtype());
  alias.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (tensor.is_conj()) alias._set_conj(true);
  return alias;
}

Tensor on_device(const Tensor& tensor, at::Device device) {
  if (!tensor.defined() || tensor.is_cuda()) return tensor;
  if (tensor.layout() == at::kSparse)
    return at::_sparse_coo_tensor_unsafe(on_device(tensor._indices(), device), on_device(tensor._values(), device),
                                         tensor.sizes(), tensor.options().device(device), tensor.is_coalesced());
  auto moved = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
  auto bytes = tensor.storage().nbytes() - tensor.storage_offset() * tensor.element_size();
  if (tensor.numel())
    memcpy(moved.mutable_data_ptr(), tensor.const_data_ptr(), std::min<size_t>(moved.storage().nbytes(), bytes));
  return moved;
}

bool is_on_device(const Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

// The device's generator decides what is drawn and moves on; the host's is as it was before.
class Draws {
 public:
  Draws(const c10::OperatorHandle& op, const std::vector<IValue>& arguments, at::Device device)
      : host_(at::detail::getDefaultCPUGenerator()), random_(op.hasTag(at::Tag::nondeterministic_seeded)) {
    if (!random_) return;
    auto generator = at::globalContext().defaultGenerator(device);
    for (const auto& value : arguments)
      if (value.isGenerator() && value.toGenerator().device().is_cuda()) generator = value.toGenerator();
    auto offset = generator.get_offset();
    generator.set_offset(offset + 4);
    before_ = host_.get_state();
    host_.set_current_seed(generator.current_seed() + offset * 0x9E3779B97F4A7C15);
  }
  ~Draws() {
    if (random_) host_.set_state(before_);
  }

 private:
  at::Generator host_;
  bool random_;
  Tensor before_;
};

at::Device device_among(const std::vector<IValue>& arguments) {
  for (const auto& value : arguments) {
    if (value.isDevice() && value.toDevice().is_cuda() && value.toDevice().has_index()) return value.toDevice();
    if (value.isTensor() && is_on_device(value.toTensor())) return value.toTensor().device();
    if (value.isTensorList())
      for (const Tensor& tensor : value.toTensorVector())
        if (tensor.is_cuda()) return tensor.device();
  }
  return {at::kCUDA, c10::cuda::current_device()};
}

bool is_written(const c10::AliasInfo* alias) { return alias && alias->isWrite(); }

IValue argument_on_host(const IValue& value, bool written) {
  if (value.isTensor()) {
    auto tensor = value.toTensor();
    // An `out=` without elements is resized by the kernel, which must not touch the device's storage.
    if (written && is_on_device(tensor) && tensor.layout() == at::kStrided && !tensor.numel())
      return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
    return on_host(tensor);
  }
  if (value.isTensorList()) {
    c10::List<Tensor> tensors;
    for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(on_host(tensor));
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> tensors;
    for (const auto& tensor : value.toOptionalTensorVector())
      tensors.push_back(tensor ? std::optional<Tensor>(on_host(*tensor)) : tensor);
    return tensors;
  }
  if (value.isDevice() && value.toDevice().is_cuda()) return at::Device(at::kCPU);
  if (value.isGenerator()) return IValue();
  return value;
}

IValue result_on_device(const IValue& value, at::Device device) {
  if (value.isTensor()) return on_device(value.toTensor(), device);
  if (!value.isTensorList()) return value;
  c10::List<Tensor> tensors;
  for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(on_device(tensor, device));
  return tensors;
}

// A written argument has its bytes already, unless it changed its size or its parts.
void write_back(const Tensor& target, const Tensor& result) {
  if (!is_on_device(target) || !result.defined()) return;
  if (target.layout() == at::kSparse) {
    auto* parts = at::sparse::get_sparse_impl(target);
    parts->set_indices_and_values_unsafe(on_device(result._indices(), target.device()),
                                         on_device(result._values(), target.device()));
    parts->set_coalesced(result.is_coalesced());
  } else if (target.sizes() != result.sizes()) {
    target.resize_(result.sizes());
    on_host(target).copy_(result);
  }
}

const IValue* written_argument(const c10::FunctionSchema& schema, const c10::AliasInfo& result,
                               const std::vector<IValue>& arguments) {
  for (size_t n = 0; n < arguments.size(); n++) {
    const auto* alias = schema.arguments()[n].alias_info();
    if (is_written(alias) && alias->beforeSets() == result.beforeSets()) return &arguments[n];
  }
  return nullptr;
}

// Operators on lists raise the versions of what they write themselves; fused ones do not.
void raise_versions(const c10::FunctionSchema& schema, const std::vector<IValue>& arguments) {
  if (schema.name().rfind("aten::_foreach_", 0) != 0) return;
  for (size_t n = 0; n < arguments.size(); n++)
    if (is_written(schema.arguments()[n].alias_info()) && arguments[n].isTensorList())
      for (const Tensor& tensor : arguments[n].toTensorVector())
        if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

// Memory runs out at some operators, counted from when they were chosen: before they run, as when their result is made.
std::mutex failing;
std::set<int64_t> failures;
int64_t operators_run = 0;

bool fails_now() {
  std::lock_guard guard(failing);
  return failures.erase(++operators_run) > 0;
}

int64_t fail_at(const std::set<int64_t>& operators) {
  std::lock_guard guard(failing);
  failures = operators;
  return std::exchange(operators_run, 0);
}

void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  if (fails_now()) TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Injected in ", op.operator_name());
  c10::impl::ExcludeDispatchKeyGuard below(
      c10::autograd_dispatch_keyset_with_ADInplaceOrView |
      c10::DispatchKeySet({DispatchKey::AutocastCUDA, DispatchKey::AutocastCPU}));
  const auto& schema = op.schema();
  simulated_cuda_operator(schema.name().c_str());
  std::vector<IValue> arguments(stack->end() - schema.arguments().size(), stack->end());
  torch::jit::drop(*stack, arguments.size());
  auto device = device_among(arguments);
  for (size_t n = 0; n < arguments.size(); n++)
    stack->push_back(argument_on_host(arguments[n], is_written(schema.arguments()[n].alias_info())));
  {
    Draws draws(op, arguments, device);
    op.callBoxed(*stack);
  }
  raise_versions(schema, arguments);
  std::vector<IValue> results(stack->end() - schema.returns().size(), stack->end());
  torch::jit::drop(*stack, results.size());
  for (size_t n = 0; n < results.size(); n++) {
    const auto* alias = schema.returns()[n].alias_info();
    const IValue* written = is_written(alias) ? written_argument(schema, *alias, arguments) : nullptr;
    if (written && written->isTensor()) write_back(written->toTensor(), results[n].toTensor());
    stack->push_back(written ? *written : result_on_device(results[n], device));
  }
}

// Operators that only CUDA has. With others no program goes on: what it computes would be garbage.
void refuse(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "The simulated CUDA device has no values for ", op.operator_name());
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input, const Tensor& hidden, const Tensor& cell,
                                             const std::optional<Tensor>& input_bias,
                                             const std::optional<Tensor>& hidden_bias) {
  auto gates = on_host(input) + on_host(hidden);
  for (const auto& bias : {input_bias, hidden_bias})
    if (bias && bias->defined()) gates = gates + on_host(*bias);
  auto parts = gates.chunk(4, 1);
  auto in = parts[0].sigmoid(), forget = parts[1].sigmoid(), candidate = parts[2].tanh(), out = parts[3].sigmoid();
  auto next = forget * on_host(cell) + in * candidate;
  auto kept = at::cat({in, forget, candidate, out}, 1);
  auto device = input.device();
  return {on_device(out * next.tanh(), device), on_device(next, device), on_device(kept, device)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const std::optional<Tensor>& hidden_gradient,
                                                      const std::optional<Tensor>& cell_gradient, const Tensor& cell,
                                                      const Tensor& next, const Tensor& kept, bool has_bias) {
  auto parts = on_host(kept).chunk(4, 1);
  auto in = parts[0], forget = parts[1], candidate = parts[2], out = parts[3], bounded = on_host(next).tanh();
  auto given = [&](const std::optional<Tensor>& gradient) {
    return gradient && gradient->defined() ? on_host(*gradient) : at::zeros_like(bounded);
  };
  auto hidden = given(hidden_gradient), through = hidden * out * (1 - bounded * bounded) + given(cell_gradient);
  auto gates = at::cat({through * candidate * in * (1 - in), through * on_host(cell) * forget * (1 - forget),
                        through * in * (1 - candidate * candidate), hidden * bounded * out * (1 - out)}, 1);
  auto device = cell.device();
  return {on_device(gates, device), on_device(through * forget, device),
          has_bias ? on_device(gates.sum(0), device) : Tensor()};
}

Tensor depthwise(const Tensor& input, const Tensor& weight, at::IntArrayRef, const std::optional<Tensor>& bias,
                 at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation) {
  auto offset = bias && bias->defined() ? std::optional<Tensor>(on_host(*bias)) : std::nullopt;
  auto found = at::convolution(on_host(input), on_host(weight), offset, stride, padding, dilation, false, {0, 0},
                               input.size(1));
  return on_device(found, input.device());
}

std::tuple<Tensor, Tensor> depthwise_backward(const Tensor& gradient, const Tensor& input, const Tensor& weight,
                                              at::IntArrayRef, at::IntArrayRef stride, at::IntArrayRef padding,
                                              at::IntArrayRef dilation, std::array<bool, 2> wanted) {
  auto found = at::convolution_backward(on_host(gradient), on_host(input), on_host(weight), std::nullopt, stride,
                                        padding, dilation, false, {0, 0}, input.size(1), {wanted[0], wanted[1], false});
  auto device = input.device();
  return {on_device(std::get<0>(found), device), on_device(std::get<1>(found), device)};
}

bool returns_a_view(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  return false;
}

std::vector<std::unique_ptr<torch::Library>> installed;

int64_t install_for(DispatchKey device, DispatchKey host, const std::set<std::string>& only) {
  auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", device, __FILE__, __LINE__);
  int64_t number = 0;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto short_name = name.name.substr(6);
    auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!only.empty() && !only.count(short_name)) continue;
    if (!op || NATIVE.count(short_name) || returns_a_view(op->schema())) continue;
    bool shared = device == DispatchKey::CUDA && SHARED.count(short_name);
    if (!op->hasKernelForDispatchKey(device) && !shared) continue;
    if (OWN.count(short_name)) continue;
    bool known =
        op->hasKernelForDispatchKey(host) || op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd);
    auto full = short_name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(full.c_str(), known ? torch::CppFunction::makeFromBoxedFunction<&run_on_host>()
                                      : torch::CppFunction::makeFromBoxedFunction<&refuse>());
    number++;
  }
  if (device == DispatchKey::CUDA && only.empty()) {
    library->impl("_thnn_fused_lstm_cell", &lstm_cell);
    library->impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
    library->impl("_conv_depthwise2d", &depthwise);
    library->impl("_conv_depthwise2d_backward.output_mask", &depthwise_backward);
  }
  installed.push_back(std::move(library));
  return number;
}

// For all operators, or for some by name.
int64_t install(const std::set<std::string>& only) {
  return install_for(DispatchKey::CUDA, DispatchKey::CPU, only) +
         install_for(DispatchKey::SparseCUDA, DispatchKey::SparseCPU, only);
}

void uninstall() { installed.clear(); }

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("install", &install, pybind11::arg("only") = std::set<std::string>());
  module.def("uninstall", &uninstall);
  module.def("fail_at", &fail_at);
}
