// The only file that knows both C++ and Python: arrays in, one call of the engine, arrays out.
// Options arrive normalised (levelhead/_options.py); shapes and dtypes are checked by describe().
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "describe.h"
#include "threads.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace levelhead {
namespace {

std::string kind_of(nb::handle object) {
  return nb::cast<std::string>(nb::handle((PyObject*)Py_TYPE(object.ptr())).attr("__name__"));
}

// str(object). nb::str() of an attribute would try to cast it to a string instead.
std::string text_of(nb::handle object) {
  return nb::cast<std::string>(nb::steal(PyObject_Str(object.ptr())));
}

PyTypeObject* ndarray_type() {
  static PyTypeObject* const type = reinterpret_cast<PyTypeObject*>(
      nb::object(nb::module_::import_("numpy").attr("ndarray")).release().ptr());
  return type;
}

[[noreturn]] void refuse_dtype(const char* name, nb::handle object) {
  std::string got = "a dtype that is none of them";
  if (nb::hasattr(object, "dtype")) got = text_of(nb::object(object.attr("dtype")));
  throw WrongType(std::string(name) + ": expected dtype " +
                  (std::strcmp(name, "mask") ? "" : "bool, ") +
                  "float32, float64, float16 or bfloat16, got " + got);
}

// What types offer as `__dlpack_c_exchange_api__` since DLPack 1.2, torch's among them: functions to
// call instead of methods, which take longer than a small call. Of all of them we only read.
struct ExchangeApi {
  std::uint32_t major, minor;
  const ExchangeApi* previous;
  void *allocate, *give, *take;
  int (*read)(void* object, nb::dlpack::dltensor* to);  // may be missing
  void* stream;

  // That of the object's type, or null.
  static const ExchangeApi* of(nb::handle object) {
    static PyTypeObject* type = nullptr;  // the last one asked about, under the GIL
    static const ExchangeApi* api = nullptr;
    if (type == Py_TYPE(object.ptr())) return api;
    const nb::object found = nb::steal(PyObject_GetAttrString(
        reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())), "__dlpack_c_exchange_api__"));
    api = found && PyCapsule_CheckExact(found.ptr())
              ? static_cast<const ExchangeApi*>(
                    PyCapsule_GetPointer(found.ptr(), "dlpack_exchange_api"))
              : nullptr;
    PyErr_Clear();
    if (api && (api->major != 1 || !api->read)) api = nullptr;
    Py_XDECREF(type);
    type = Py_TYPE(object.ptr());
    Py_INCREF(type);
    return api;
  }
};

// An array argument, held while the engine works on it. NumPy arrays come through the buffer
// protocol (the quickest way), others through DLPack; nothing is copied either way.
class Array {
 public:
  ArrayView view;

  Array(const char* name, nb::handle object) {
    view.name = name;
    if (PyObject_TypeCheck(object.ptr(), ndarray_type()))
      read_buffer(object);
    else
      read_dlpack(object);
  }
  ~Array() {
    if (has_buffer_) PyBuffer_Release(&buffer_);
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

 private:
  Py_buffer buffer_;
  bool has_buffer_ = false;
  nb::ndarray<nb::ro> dlpack_;
  nb::object keep_;

  void check_rank(Py_ssize_t ndim) {
    if (ndim > ArrayView::kMaxDims)
      throw WrongValue(std::string(view.name) + ": expected at most " +
                       std::to_string(ArrayView::kMaxDims) + " dimensions, got " +
                       std::to_string(ndim));
  }

  void read_buffer(nb::handle object) {
    bool bfloat16 = false;
    if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_FULL_RO) != 0) {
      PyErr_Clear();  // a dtype that buffers cannot express; ml_dtypes' bfloat16 is one
      if (text_of(nb::object(object.attr("dtype"))) != "bfloat16")
        refuse_dtype(view.name, object);
      bfloat16 = true;
      keep_ = object.attr("view")("uint16");
      if (PyObject_GetBuffer(keep_.ptr(), &buffer_, PyBUF_FULL_RO) != 0) throw nb::python_error();
    }
    has_buffer_ = true;
    const char* format = buffer_.format ? buffer_.format : "B";
    if (*format == '=' || *format == '@' || *format == '<') ++format;
    if (bfloat16) view.dtype = Dtype::bf16;
    else if (!std::strcmp(format, "f")) view.dtype = Dtype::f32;
    else if (!std::strcmp(format, "d")) view.dtype = Dtype::f64;
    else if (!std::strcmp(format, "e")) view.dtype = Dtype::f16;
    else if (!std::strcmp(format, "?")) view.dtype = Dtype::boolean;
    else refuse_dtype(view.name, object);
    check_rank(buffer_.ndim);
    view.data = buffer_.buf;
    view.ndim = buffer_.ndim;
    for (int d = 0; d < view.ndim; ++d) {
      view.shape[d] = buffer_.shape[d];
      view.stride[d] = buffer_.strides[d] / buffer_.itemsize;
      if (buffer_.strides[d] % buffer_.itemsize != 0)
        throw WrongValue(std::string(view.name) +
                         ": expected strides in whole elements, got a view between elements");
    }
  }

  void check_device(nb::handle object) {
    if (!nb::hasattr(object, "__dlpack_device__")) return;
    try {
      const nb::tuple device = nb::cast<nb::tuple>(object.attr("__dlpack_device__")());
      if (nb::cast<int>(device[0]) == nb::device::cpu::value) return;
    } catch (nb::python_error&) {  // a device that DLPack has no name for, as torch's "meta"
    }
    throw WrongValue(std::string(view.name) + ": expected an array on the CPU, got one on " +
                     (nb::hasattr(object, "device") ? text_of(nb::object(object.attr("device")))
                                                    : "another device"));
  }

  void read_dlpack(nb::handle object) {
    if (nb::hasattr(object, "requires_grad") &&
        nb::object(object.attr("requires_grad")).ptr() == Py_True)
      throw WrongValue(std::string(view.name) +
                       ": expected a tensor without requires_grad, as no gradient is recorded "
                       "here, got one with it; pass its detach()");
    if (nb::hasattr(object, "is_neg") && nb::object(object.attr("is_neg")()).ptr() == Py_True)
      throw WrongValue(std::string(view.name) +
                       ": expected a tensor of values as they lie in memory, got one that is to be "
                       "negated; pass its resolve_neg()");
    if (const ExchangeApi* api = ExchangeApi::of(object)) {
      nb::dlpack::dltensor t;
      if (api->read(object.ptr(), &t) == 0 && t.strides &&
          t.device.device_type == nb::device::cpu::value)
        return take(object, t.dtype, t.ndim, static_cast<char*>(t.data) + t.byte_offset, t.shape,
                    t.strides);
      PyErr_Clear();  // what is wrong is told below
    }
    if (!nb::hasattr(object, "__dlpack__"))
      throw WrongType(std::string(view.name) +
                      ": expected a NumPy array or one that speaks DLPack, got " +
                      kind_of(object));
    check_device(object);
    if (!nb::try_cast(object, dlpack_)) {
      try {  // the cast keeps its reason to itself; asking again gives it
        object.attr("__dlpack__")();
      } catch (nb::python_error& error) {
        throw WrongValue(std::string(view.name) +
                         ": expected an array that DLPack can pass on, got the error: " +
                         text_of(error.value()));
      }
      refuse_dtype(view.name, object);
    }
    take(object, dlpack_.dtype(), static_cast<std::int32_t>(dlpack_.ndim()),
         const_cast<void*>(dlpack_.data()), dlpack_.shape_ptr(), dlpack_.stride_ptr());
  }

  void take(nb::handle object, nb::dlpack::dtype t, std::int32_t ndim, void* data,
            const std::int64_t* shape, const std::int64_t* strides) {
    const auto code = static_cast<nb::dlpack::dtype_code>(t.code);
    if (t.lanes != 1) refuse_dtype(view.name, object);
    if (code == nb::dlpack::dtype_code::Float && t.bits == 32) view.dtype = Dtype::f32;
    else if (code == nb::dlpack::dtype_code::Float && t.bits == 64) view.dtype = Dtype::f64;
    else if (code == nb::dlpack::dtype_code::Float && t.bits == 16) view.dtype = Dtype::f16;
    else if (code == nb::dlpack::dtype_code::Bfloat && t.bits == 16) view.dtype = Dtype::bf16;
    else if (code == nb::dlpack::dtype_code::Bool) view.dtype = Dtype::boolean;
    else refuse_dtype(view.name, object);
    check_rank(ndim);
    view.data = data;
    view.ndim = ndim;
    std::copy_n(shape, ndim, view.shape);
    std::copy_n(strides, ndim, view.stride);
    if (!data && !std::count(shape, shape + ndim, 0))
      throw WrongValue(std::string(view.name) + ": expected an array with data, got a " +
                       kind_of(object) + " without");
  }
};

// A new NumPy array and the view of it. bfloat16 is made as uint16; _attention.py gives it its name.
struct NewArray {
  nb::object object;
  ArrayView view;

  NewArray(const std::vector<Index>& shape, Dtype dtype) {
    static const nb::handle numpy = nb::module_::import_("numpy").release();  // lives on
    static PyObject* const empty = nb::object(numpy.attr("empty")).release().ptr();
    static const nb::handle make = nb::object(numpy.attr("dtype")).release();
    static PyObject* const names[] = {make("float32").release().ptr(), make("float64").release().ptr(),
                                      make("float16").release().ptr(), make("uint16").release().ptr()};
    nb::object sizes = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(shape.size())));
    for (std::size_t d = 0; d < shape.size(); ++d)
      PyTuple_SET_ITEM(sizes.ptr(), static_cast<Py_ssize_t>(d), PyLong_FromLongLong(shape[d]));
    PyObject* arguments[] = {sizes.ptr(), names[static_cast<int>(dtype)]};
    object = nb::steal(PyObject_Vectorcall(empty, arguments, 2, nullptr));
    if (!object) throw nb::python_error();
    Py_buffer buffer;
    if (PyObject_GetBuffer(object.ptr(), &buffer, PyBUF_SIMPLE | PyBUF_WRITABLE) != 0)
      throw nb::python_error();
    view.data = buffer.buf;
    PyBuffer_Release(&buffer);
    view.dtype = dtype;
    view.ndim = static_cast<int>(shape.size());
    Index stride = 1;
    for (int d = view.ndim - 1; d >= 0; --d) {
      view.shape[d] = shape[static_cast<std::size_t>(d)];
      view.stride[d] = stride;
      stride *= view.shape[d];
    }
  }
};

// Of the precision that a dtype is computed in.
double greatest_number(Dtype dtype) {
  if (dtype == Dtype::f64) return std::numeric_limits<double>::max();
  return double{std::numeric_limits<float>::max()};
}

// Per-batch or per-head numbers, already normalised to a contiguous array.
template <class T>
using Numbers = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The options of a call as _options.py normalises them.
class Options {
 public:
  explicit Options(Problem& problem) : p(problem) {}

  void set(Index left, Index right, nb::handle query_offset, nb::handle key_lengths,
           nb::handle scale, double softcap, nb::handle sinks, double dropout, std::uint64_t seed,
           int threads) {
    p.left = left;
    p.right = right;
    if (query_offset.is_none()) {
      p.query_offset = p.keys - p.queries;
    } else if (PyLong_Check(query_offset.ptr())) {
      int overflow = 0;
      p.query_offset = PyLong_AsLongLongAndOverflow(query_offset.ptr(), &overflow);
      check_offset(p.query_offset, overflow != 0, query_offset);
    } else {
      offsets_ = nb::cast<Numbers<std::int64_t>>(query_offset);
      p.query_offsets = offsets_.data();
      check_count("query_offset", "batch entry", offsets_.size(), p.batch);
      for (Index b = 0; b < p.batch; ++b)
        check_offset(p.query_offsets[b], false, nb::int_(p.query_offsets[b]));
    }
    if (!key_lengths.is_none()) {
      lengths_ = nb::cast<Numbers<std::int64_t>>(key_lengths);
      p.key_lengths = lengths_.data();
      check_count("key_lengths", "batch entry", lengths_.size(), p.batch);
      for (Index b = 0; b < p.batch; ++b)
        if (p.key_lengths[b] < 0 || p.key_lengths[b] > p.keys)
          throw WrongValue("key_lengths: expected integers from 0 to " + std::to_string(p.keys) +
                           " (the number of keys), got " + std::to_string(p.key_lengths[b]) +
                           " for batch entry " + std::to_string(b));
    }
    if (scale.is_none()) {
      p.scale = 1.0 / std::sqrt(static_cast<double>(p.key_dim));
    } else if (PyFloat_Check(scale.ptr())) {
      p.scale = nb::cast<double>(scale);
    } else {
      scales_ = nb::cast<Numbers<double>>(scale);
      p.scales = scales_.data();
      check_count("scale", "query head", scales_.size(), p.heads);
    }
    if (!sinks.is_none()) {
      sinks_ = nb::cast<Numbers<double>>(sinks);
      p.sinks = sinks_.data();
      check_count("sinks", "query head", sinks_.size(), p.heads);
    }
    p.softcap = softcap * 1.5 < greatest_number(p.query.dtype) ? softcap : 0.0;  // else it is none
    p.dropout = dropout;
    p.seed = seed;
    static const int available = available_threads();
    p.threads = threads > 0 ? threads : available;
  }

 private:
  Problem& p;
  Numbers<std::int64_t> offsets_, lengths_;
  Numbers<double> scales_, sinks_;

  // Beyond these, a position plus a window could leave the range of Index.
  static void check_offset(Index offset, bool overflow, nb::handle given) {
    constexpr Index limit = Index{1} << 60;
    if (overflow || offset < -limit || offset > limit)
      throw WrongValue("query_offset: expected integers from -2**60 to 2**60, got " +
                       text_of(given));
  }

  static void check_count(const char* name, const char* of, std::size_t got, Index expected) {
    if (static_cast<Index>(got) != expected)
      throw WrongValue(std::string(name) + ": expected one number per " + of + ", " +
                       std::to_string(expected) + " in all, got " + std::to_string(got));
  }
};

// Small calls keep the GIL: giving it away and asking for it again costs more than they do.
template <class F>
void run(const Problem& p, F f) {
  const Index work = p.batch * p.heads * p.queries * p.keys * (p.key_dim + p.value_dim);
  if (work < 1 << 15) return f();
  bool stopped;
  {
    nb::gil_scoped_release release;
    const Interruptible call([] {
      nb::gil_scoped_acquire acquire;
      return PyErr_CheckSignals() != 0;
    });
    try {
      f();
    } catch (const Interrupted&) {
    }
    stopped = call.stopped();
  }
  if (stopped) throw nb::python_error();  // what a signal handler raised, KeyboardInterrupt usually
}

Dtype lse_dtype(Dtype dtype) { return dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32; }

// A class of the package, which lives on.
PyTypeObject* class_of(const char* module, const char* name) {
  return reinterpret_cast<PyTypeObject*>(
      nb::object(nb::module_::import_(module).attr(name)).release().ptr());
}

// Health(sums)
nb::object new_health(const nb::object& sums) {
  static PyObject* const type = reinterpret_cast<PyObject*>(class_of("levelhead._health", "Health"));
  PyObject* arguments[] = {sums.ptr()};
  nb::object health = nb::steal(PyObject_Vectorcall(type, arguments, 1, nullptr));
  if (!health) throw nb::python_error();
  return health;
}

// AttentionResult(...), without its constructor, which a tiny call would feel.
nb::object new_result(nb::object output, nb::object lse, nb::object weights, nb::object health) {
  static PyTypeObject* const type = class_of("levelhead._result", "AttentionResult");
  nb::object result = nb::steal(type->tp_alloc(type, 4));
  if (!result) throw nb::python_error();
  PyTuple_SET_ITEM(result.ptr(), 0, output.release().ptr());
  PyTuple_SET_ITEM(result.ptr(), 1, lse.release().ptr());
  PyTuple_SET_ITEM(result.ptr(), 2, weights.release().ptr());
  PyTuple_SET_ITEM(result.ptr(), 3, health.release().ptr());
  return result;
}

// Output alone if nothing else is asked for, else an AttentionResult.
nb::any forward(nb::handle query, nb::handle key, nb::handle value, nb::handle mask, Index left,
                Index right, nb::handle query_offset, nb::handle key_lengths, nb::handle scale,
                double softcap, nb::handle sinks, double dropout, std::uint64_t seed, int threads,
                bool want_lse, bool want_health, bool want_weights) {
  Problem p;
  const Array q("query", query), k("key", key), v("value", value);
  describe(p, q.view, k.view, v.view);
  std::optional<Array> m;
  if (!mask.is_none()) {
    m.emplace("mask", mask);
    describe_mask(p, q.view, m->view);
  }
  Options options(p);
  options.set(left, right, query_offset, key_lengths, scale, softcap, sinks, dropout, seed, threads);

  const Dtype dtype = q.view.dtype;
  std::vector<Index> shape(q.view.shape, q.view.shape + q.view.ndim);
  shape.back() = p.value_dim;
  NewArray output(shape, dtype);
  p.output = describe_like(q.view, output.view, p.heads, p.queries, p.value_dim);
  if (!(want_lse || want_health || want_weights)) {
    run(p, [&] { kernels().forward(p); });
    return nb::borrow<nb::any>(output.object);
  }
  std::optional<NewArray> lse, weights, sums;
  if (want_lse) {
    lse.emplace(std::vector<Index>(shape.begin(), shape.end() - 1), lse_dtype(dtype));
    p.lse = lse->view.data;
  }
  if (want_weights) {
    shape.back() = p.keys;
    weights.emplace(shape, dtype);
    p.weights = describe_like(q.view, weights->view, p.heads, p.queries, p.keys);
  }
  if (want_health) {
    sums.emplace(shape_like(q.view, {p.heads, kHealthSums}), Dtype::f64);
    p.health = static_cast<double*>(sums->view.data);
  }
  run(p, [&] { kernels().forward(p); });
  auto given = [](bool wanted, auto& a) { return wanted ? a->object : nb::none(); };
  return nb::borrow<nb::any>(new_result(output.object, given(want_lse, lse),
                                        given(want_weights, weights),
                                        want_health ? new_health(sums->object) : nb::none()));
}

// (dq, dk, dv, gradient health sums or None, gradient of the scores or None)
nb::typed<nb::tuple, nb::any, nb::ellipsis> backward(
    nb::handle grad_output, nb::handle query, nb::handle key, nb::handle value, nb::handle output,
    nb::handle lse, nb::handle mask, Index left, Index right, nb::handle query_offset,
    nb::handle key_lengths, nb::handle scale, double softcap, nb::handle sinks, double dropout,
    std::uint64_t seed, int threads, bool want_health, bool want_scores) {
  Problem p;
  const Array q("query", query), k("key", key), v("value", value);
  describe(p, q.view, k.view, v.view);
  const Array g("grad_output", grad_output), o("output", output), l("lse", lse);
  p.grad_output = describe_like(q.view, g.view, p.heads, p.queries, p.value_dim);
  p.output = describe_like(q.view, o.view, p.heads, p.queries, p.value_dim);
  describe_lse(p, q.view, l.view);
  std::optional<Array> m;
  if (!mask.is_none()) {
    m.emplace("mask", mask);
    describe_mask(p, q.view, m->view);
  }
  Options options(p);
  options.set(left, right, query_offset, key_lengths, scale, softcap, sinks, dropout, seed, threads);

  auto shape_of = [](const ArrayView& a) { return std::vector<Index>(a.shape, a.shape + a.ndim); };
  NewArray dq(shape_of(q.view), q.view.dtype), dk(shape_of(k.view), q.view.dtype);
  NewArray dv(shape_of(v.view), q.view.dtype);
  p.grad_query = describe_like(q.view, dq.view, p.heads, p.queries, p.key_dim);
  p.grad_key = describe_like(q.view, dk.view, p.kv_heads, p.keys, p.key_dim);
  p.grad_value = describe_like(q.view, dv.view, p.kv_heads, p.keys, p.value_dim);
  std::optional<NewArray> health, scores;
  if (want_health) {
    health.emplace(shape_like(q.view, {p.heads, kGradSums}), Dtype::f64);
    p.grad_health = static_cast<double*>(health->view.data);
  }
  if (want_scores) {
    std::vector<Index> shape = shape_of(q.view);
    shape.back() = p.keys;
    scores.emplace(shape, lse_dtype(q.view.dtype));
    p.grad_scores = scores->view.data;
    std::memset(p.grad_scores, 0,
                static_cast<std::size_t>(p.batch * p.heads * p.queries * p.keys) *
                    size_of(scores->view.dtype));
  }
  run(p, [&] { kernels().backward(p); });
  return nb::make_tuple(dq.object, dk.object, dv.object, want_health ? health->object : nb::none(),
                        want_scores ? scores->object : nb::none());
}

nb::typed<nb::tuple, nb::str, nb::ellipsis> names(std::initializer_list<const char*> all) {
  nb::list list;
  for (const char* name : all) list.append(name);
  return nb::borrow<nb::typed<nb::tuple, nb::str, nb::ellipsis>>(nb::tuple(list));
}

nb::typed<nb::dict, nb::str, nb::any> cpu_info() {
  const Kernels& k = kernels();
  nb::dict info;
  info["isa"] = k.isa;
  info["vector_bits"] = 8 * k.vector_bytes;
  info["threads"] = available_threads();
  return info;
}

template <class T>
void exp2_into(nb::ndarray<const T, nb::ndim<1>, nb::c_contig> x,
               nb::ndarray<T, nb::ndim<1>, nb::c_contig> y) {
  const Index n = static_cast<Index>(std::min(x.size(), y.size()));
  if constexpr (sizeof(T) == 8) kernels().exp2_f64(x.data(), y.data(), n);
  else kernels().exp2_f32(x.data(), y.data(), n);
}

template <class T>
void log1p_into(nb::ndarray<const T, nb::ndim<1>, nb::c_contig> x,
                nb::ndarray<T, nb::ndim<1>, nb::c_contig> y) {
  const Index n = static_cast<Index>(std::min(x.size(), y.size()));
  if constexpr (sizeof(T) == 8) kernels().log1p_f64(x.data(), y.data(), n);
  else kernels().log1p_f32(x.data(), y.data(), n);
}

}  // namespace
}  // namespace levelhead

NB_MODULE(_engine, m) {
  using namespace levelhead;
  m.doc() = "The engine, as levelhead/_attention.py calls it.";
  nb::register_exception_translator([](const std::exception_ptr& e, void*) {
    try {
      std::rethrow_exception(e);
    } catch (const WrongType& error) {
      PyErr_SetString(PyExc_TypeError, error.what());
    } catch (const WrongValue& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
    }
  });
  m.attr("OPEN") = kOpen;
  m.def("health_columns", [] { return names({LEVELHEAD_HEALTH_SUMS(LEVELHEAD_COLUMN_NAME)}); });
  m.def("grad_columns", [] { return names({LEVELHEAD_GRAD_SUMS(LEVELHEAD_COLUMN_NAME)}); });
  m.def("forward", &forward, "query"_a.none(), "key"_a.none(), "value"_a.none(), "mask"_a.none(),
        "left"_a, "right"_a,
        "query_offset"_a.none(), "key_lengths"_a.none(), "scale"_a.none(), "softcap"_a,
        "sinks"_a.none(), "dropout"_a, "seed"_a, "threads"_a, "lse"_a, "health"_a, "weights"_a);
  m.def("backward", &backward, "grad_output"_a.none(), "query"_a.none(), "key"_a.none(),
        "value"_a.none(), "output"_a.none(), "lse"_a.none(), "mask"_a.none(), "left"_a,
        "right"_a, "query_offset"_a.none(), "key_lengths"_a.none(),
        "scale"_a.none(), "softcap"_a, "sinks"_a.none(), "dropout"_a, "seed"_a, "threads"_a,
        "health"_a, "scores"_a);
  m.def("cpu_info", &cpu_info);
  m.def("exp2", &exp2_into<float>, "x"_a.noconvert(), "y"_a.noconvert());
  m.def("exp2", &exp2_into<double>, "x"_a.noconvert(), "y"_a.noconvert());
  m.def("log1p", &log1p_into<float>, "x"_a.noconvert(), "y"_a.noconvert());
  m.def("log1p", &log1p_into<double>, "x"_a.noconvert(), "y"_a.noconvert());
  m.def("measure_fma_peak", [](int threads) { return kernels().fma_peak(threads); }, "threads"_a,
        nb::call_guard<nb::gil_scoped_release>());
  m.def("measure_read_bandwidth", [](int threads) { return kernels().read_bandwidth(threads); },
        "threads"_a, nb::call_guard<nb::gil_scoped_release>());
}
