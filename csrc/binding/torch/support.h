// Support code around torch: errors as Python exceptions, tensors as flat memory. Only the files of
// binding/torch include torch; they are one compilation unit.
#pragma once
#include <c10/util/SmallVector.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "binding/core/errors.h"
#include "collectives/common/parts.h"
#include "collectives/queue.h"

namespace pycomm::torch_binding {

namespace py = pybind11;
using c10::intrusive_ptr;
using c10d::OpType;
using Tensors = std::vector<at::Tensor>;

// ------------------------------------------------------------------ errors

/// Replaces a kept exception by the arguments of its class, from which each throw makes one of its
/// own. An exception refers to all frames that it has passed through, and these may refer to what
/// keeps it, such as a work or a future: a cycle that no garbage collector would see.
inline void keep_arguments_only(python_error& error) {
  PyErr_NormalizeException(&error.type, &error.value, &error.traceback);
  const auto exception = py::reinterpret_borrow<py::object>(error.value);
  py::object arguments = py::tuple(exception.attr("__reduce__")())[1];
  Py_DECREF(std::exchange(error.value, arguments.release().ptr()));
  Py_XDECREF(std::exchange(error.traceback, nullptr));
}

/// Returns the same error as an exception of pycomm.errors. Torch passes this form through
/// unchanged, also out of futures and out of backward(), and it may be thrown many times.
inline std::exception_ptr as_python(std::exception_ptr error) {
  if (!Py_IsInitialized() || Py_IsFinalizing()) return error;
  GilAcquired gil;
  try {
    translate_errors(error);
  } catch (...) {
    return error;  // not one of ours
  }
  python_error python;
  python.persist();
  keep_arguments_only(python);
  return std::make_exception_ptr(std::move(python));
}

/// Releases the interpreter for other threads, if this one has it.
class WithoutGil {
 public:
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) release_.emplace();
  }

 private:
  std::optional<GilReleased> release_;
};

/// The end of the interpreter, at which a thread that comes out of C++ and asks for it is ended on
/// the spot, in the middle of C++, which ends the process. So threads that wake up in here then
/// stay.
class InterpreterEnd {
 public:
  /// Called by the thread that ends the interpreter, before it waits for others.
  static void begin() {
    ending_thread() = std::this_thread::get_id();
    begun() = true;
  }
  static bool has_begun() { return begun().load(std::memory_order_relaxed); }
  /// Called by threads of Python, before they leave a wait: they are daemons, for Python has waited
  /// for all others. Does not return once the end has begun.
  static void stay_if_begun() {
    if (!has_begun() || Queue::inside_any()) return;
    if (std::this_thread::get_id() == ending_thread()) return;
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
  }

 private:
  static std::atomic<bool>& begun() {
    static std::atomic<bool> begun{false};
    return begun;
  }
  static std::thread::id& ending_thread() {
    static std::thread::id id;
    return id;
  }
};

/// Throws an error to a caller in torch or Python. An interrupted wait throws what the handler of
/// the signal has raised, as it is.
[[noreturn]] inline void leave_with(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Interrupted& interrupted) {
    std::rethrow_exception(interrupted.cause);
  } catch (...) {
  }
  InterpreterEnd::stay_if_begun();  // a Python exception needs the interpreter, too
  const std::exception_ptr python = as_python(error);
  InterpreterEnd::stay_if_begun();
  std::rethrow_exception(python);
}

template <typename E = Error>
[[noreturn]] void raise(const std::string& text) {
  leave_with(std::make_exception_ptr(E(text)));
}

template <typename F>
auto with_python_errors(F&& f) {
  try {
    return f();
  } catch (...) {
    leave_with(std::current_exception());
  }
}

// ------------------------------------------------------------------ waits

/// The backoff of polling waits. Frequent polls at first, since most waits are short, and then
/// other threads may run. Throws Interrupted.
class Backoff {
 public:
  void wait() {
    interrupts_.check();
    if (++looks_ <= kEager) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

 private:
  static constexpr int kEager = 200;
  InterruptPoll interrupts_;
  int looks_ = 0;
};

// ----------------------------------------------------------------- tensors

/// Returns nothing for a dtype that the core does not know.
inline std::optional<DType> find_dtype(at::ScalarType type) {
  // In the order of DType.
  static constexpr at::ScalarType kTypes[] = {
      at::kFloat,  at::kDouble, at::kHalf, at::kBFloat16,     at::kFloat8_e4m3fn, at::kFloat8_e5m2,
      at::kChar,   at::kShort,  at::kInt,  at::kLong,         at::kByte,          at::kUInt16,
      at::kUInt32, at::kUInt64, at::kBool, at::kComplexFloat, at::kComplexDouble};
  static_assert(sizeof kTypes / sizeof *kTypes == kDTypes);
  for (int i = 0; i < kDTypes; i++) {
    if (kTypes[i] == type) return static_cast<DType>(i);
  }
  return std::nullopt;
}

/// A tensor as an operation that only moves data sees it: dtypes that the core does not know travel
/// as bytes.
struct Elements {
  explicit Elements(const at::Tensor& t) {
    const auto known = find_dtype(t.scalar_type());
    if (known)
      dtype = *known;
    else
      per_element = t.element_size();
  }
  size_t count(const at::Tensor& t) const { return static_cast<size_t>(t.numel()) * per_element; }

  DType dtype = DType::uint8;
  size_t per_element = 1;
};

/// A tensor as one run of memory: the tensor itself where it is contiguous, else a copy.
class Flat {
 public:
  explicit Flat(const at::Tensor& t)
      : tensor_(t), flat_(is_flat(t) ? t : t.resolve_conj().resolve_neg().contiguous()) {}
  /// The values are of this dtype.
  Flat(const at::Tensor& t, at::ScalarType type) : Flat(t) { flat_ = flat_.to(type); }

  const void* in() const { return flat_.const_data_ptr(); }
  void* out() const { return flat_.mutable_data_ptr(); }
  const at::Tensor& tensor() const { return tensor_; }
  size_t numel() const { return static_cast<size_t>(flat_.numel()); }
  size_t bytes() const { return flat_.nbytes(); }
  /// True if out() is not the tensor's own memory.
  bool is_copy() const { return !flat_.is_same(tensor_); }
  /// Copies what was written to out() into the tensor.
  void finish() const {
    if (is_copy()) tensor_.copy_(flat_);
  }

 private:
  // True if contiguous() would return the tensor, without a new reference at each step.
  static bool is_flat(const at::Tensor& t) {
    return !t.is_conj() && !t.is_neg() && t.is_contiguous();
  }

  at::Tensor tensor_, flat_;
};

/// One tensor per rank, each as one run of memory. Small groups allocate nothing.
class FlatList {
 public:
  template <typename T>
  using List = c10::SmallVector<BasicPart<T>, 8>;

  explicit FlatList(const Tensors& tensors) : flats_(tensors.begin(), tensors.end()) {}
  /// Returns parts for operations that read the tensors. No list gives no parts.
  List<const void> in() const {
    return list<const void>([](const Flat& flat) { return flat.in(); });
  }
  /// Returns parts for operations that write the tensors; finish() must follow.
  List<void> out() const {
    return list<void>([](const Flat& flat) { return flat.out(); });
  }
  void finish() const {
    for (const Flat& flat : flats_) flat.finish();
  }

 private:
  template <typename T, typename F>
  List<T> list(const F& data) const {
    List<T> parts;
    for (const Flat& flat : flats_)
      parts.push_back({data(flat), Elements(flat.tensor()).count(flat.tensor())});
    return parts;
  }

  c10::SmallVector<Flat, 8> flats_;
};

/// Calls visit(part, t) with the part of `packed` that has the values of t, in its shape.
template <typename F>
void for_each_part(const at::Tensor& packed, const Tensors& tensors, const F& visit) {
  int64_t offset = 0;
  for (const at::Tensor& t : tensors) {
    visit(packed.narrow(0, offset, t.numel()).view(t.sizes()), t);
    offset += t.numel();
  }
}

/// Returns the values of all tensors, one after another.
inline at::Tensor pack(const Tensors& tensors) {
  int64_t numel = 0;
  for (const at::Tensor& t : tensors) numel += t.numel();
  const at::Tensor packed = at::empty({numel}, tensors.at(0).options());
  if (!packed.is_cpu()) {
    for_each_part(packed, tensors,
                  [](const at::Tensor& part, const at::Tensor& t) { part.copy_(t); });
    return packed;
  }
  auto* to = static_cast<uint8_t*>(packed.mutable_data_ptr());
  for (const at::Tensor& t : tensors) {
    const Flat flat(t);
    if (flat.bytes()) std::memcpy(to, flat.in(), flat.bytes());
    to += flat.bytes();
  }
  return packed;
}

inline void unpack(const at::Tensor& packed, const Tensors& tensors) {
  for_each_part(packed, tensors,
                [](const at::Tensor& part, const at::Tensor& t) { t.copy_(part); });
}

}  // namespace pycomm::torch_binding
