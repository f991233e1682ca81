// Codec: a stateless map between float32 values and wire bytes. Bytes: docs/wire/.
#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/types.h"

namespace pycomm {

/// The way in which the payloads of a codec are combined across ranks.
enum class Combine : uint8_t {
  recode,  ///< added up at the owner, divide, then encode again (cast, quant, mx, sign)
  gather,  ///< payloads differ in place: all-gather, then add each in rank order (top-k)
};

/// Key of every random number of one encode: a value's rounding depends on the key and on its index
/// in its tensor, never on thread, bucket layout or number of ranks. Each rank has its own seed.
struct RandomKey {
  uint64_t seed = 0;
  uint32_t step = 0;
  uint32_t tensor = 0;
};

/// Contributions of ranks to the same values: a payload of the same codec every `stride` bytes.
struct Contributions {
  const uint8_t* payloads = nullptr;
  size_t stride = 0;
  uint32_t ranks = 0;
  float divisor = 1.0f;  ///< of their sum, in rank order
};

/// Residuals in a stored form (base/stored.h), which are multiplied by `decay` when they are read.
struct Residual {
  const uint8_t* old = nullptr;  ///< null: no feedback
  uint8_t* fresh = nullptr;      ///< may be `old`; null iff `old` is null
  uint32_t form = 0;
  float decay = 1.0f;

  /// True if they are float32 as they are. Every codec takes these.
  bool plain() const { return form == 0 && decay == 1.0f; }
  /// Returns them, or null if they are not plain or there are none.
  const float* floats() const { return plain() ? reinterpret_cast<const float*>(old) : nullptr; }
  float* fresh_floats() const { return plain() ? reinterpret_cast<float*>(fresh) : nullptr; }
};

struct EncodeArgs {
  Span<const float> in;
  Span<uint8_t> out;  ///< exactly encoded_bytes(in.size)
  Residual residual;  ///< of in.size values
  RandomKey key;
  uint64_t index = 0;  ///< place of in[0] in its tensor; a multiple of granule()
  Stream stream;
  /// For codecs that take them, on cuda: if it has ranks, they are the input; `in` has only a size.
  Contributions sum;

  bool has_residual() const { return residual.old != nullptr; }
};

/// Stateless and thread-safe codec. Error feedback and step counters live in the caller.
class PYCOMM_API Codec {
 public:
  virtual ~Codec() = default;

  virtual std::string_view name() const = 0;
  /// Canonical text, "quant:bits=4,block=128,rounding=nearest": equal text, equal bytes.
  virtual std::string spec() const = 0;
  virtual Combine combine() const { return Combine::recode; }
  /// Version that is raised whenever a byte on the wire changes; checked in the rendezvous.
  virtual int wire_version() const = 0;

  /// Block size: a tensor may be cut for encoding only at multiples of this many values; 0: not at
  /// all.
  virtual size_t granule() const = 0;
  /// Exact payload size, a multiple of 4: both ends know it without a header. If variable(), the
  /// largest size.
  virtual size_t encoded_bytes(size_t numel) const = 0;

  /// True if payloads begin with a uint32 that says how many of their bytes are used, a multiple of
  /// 4. Only those need to travel.
  virtual bool variable() const { return false; }

  /// Scratch memory that, on cuda, the stream of a call on this many values must provide; its
  /// contents are not kept between calls.
  virtual size_t scratch_bytes(size_t numel) const {
    (void)numel;
    return 0;
  }

  /// True if encode() reads and writes residuals that are not plain, on cuda in its one kernel.
  virtual bool takes_stored(Device device) const {
    (void)device;
    return false;
  }
  /// True if the kernel also sums contributions.
  virtual bool fuses_sum() const { return false; }

  /// Encodes in one pass. With a residual: p = in + residual, out = code(p), new_residual = p -
  /// decode(out). A block that holds Inf or NaN travels as NaN and leaves its residual as it was.
  /// Throws Error if sizes, pointers, the index or the scratch memory do not fit the codec.
  void encode(const EncodeArgs& args) const;
  /// Computes out = decode(payload), or with `add` out = out + decode(payload), in float32.
  /// `payload.size` must be encoded_bytes(out.size); payload bytes come from the network and may
  /// hold anything. Throws as encode().
  void decode(Span<const uint8_t> payload, Span<float> out, Stream stream, bool add = false) const;

 protected:
  // What these do after their checks, of at least one value.

  virtual void encode_cpu(const EncodeArgs& args) const = 0;
  virtual void decode_cpu(Span<const uint8_t> payload, Span<float> out, bool add) const = 0;
  // Both queue launches (base/launch.h).
  virtual void encode_cuda(const EncodeArgs& args) const = 0;
  virtual void decode_cuda(Span<const uint8_t> payload, Span<float> out, bool add,
                           const Stream& stream) const = 0;
};

/// A short name of a codec with one option, which more options may follow: "int4:block=64".
struct CodecAlias {
  std::string_view name, codec, option;
};

/// Makes a codec from a spec such as "quant:bits=4,block=128" or "int4"; omitted options have their
/// default. Throws Error with the list of known names.
PYCOMM_API std::unique_ptr<Codec> make_codec(std::string_view spec);
PYCOMM_API std::vector<std::string> codec_names();
PYCOMM_API std::vector<CodecAlias> codec_aliases();

}  // namespace pycomm
