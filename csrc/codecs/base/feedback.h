// Error feedback around a codec: what an encode reads of the previous steps, and what it stores for
// the next. The rules and the stored forms are defined in docs/feedback.md; pycomm/feedback/ has
// the same in torch, with the same bits.
#pragma once
#include <array>
#include <memory>
#include <utility>

#include "codecs/base/codec.h"
#include "codecs/base/stored.h"

namespace pycomm::feedback {

enum class Kind : uint8_t {
  residual,  ///< p = x + e; e <- p - decode
  decay,     ///< p = x + decay * e; e <- p - decode
  momentum,  ///< u <- decay * u + x; p = v + u; v <- p - decode; u <- 0 where values were sent
};

/// Form in which a memory stores its values. All bytes zero are zeros.
enum class Storage : uint8_t {
  float32,
  int8,  ///< blocks of kBlock values: a float32 scale, then the codes
};
using codecs::stored::kBlock;
using codecs::stored::kBlockBytes;

/// Returns the bytes of `numel` values, or the place of value `numel` if that is a multiple of
/// kBlock.
PYCOMM_API size_t stored_bytes(Storage storage, size_t numel);
PYCOMM_API void load(Storage storage, const uint8_t* stored, Span<float> out);
PYCOMM_API void store(Storage storage, Span<const float> in, uint8_t* stored);

/// Values that a step reads, and the memory to which it writes new ones: separate, so that a step
/// can be reverted, or in place.
struct Memory {
  const uint8_t* old = nullptr;
  uint8_t* fresh = nullptr;
  /// The values that have memory, if there is one row: from and to multiples of kBlock, or the end.
  size_t begin = 0, end = SIZE_MAX;

  explicit operator bool() const { return old != nullptr || begin == end; }
  Memory at(size_t bytes) const { return {old + bytes, fresh + bytes}; }
};

/// Of each side of a memory, the values that it has: the first one, and the one behind the last.
using Spans = std::array<std::pair<size_t, size_t>, 2>;
inline constexpr Spans kAllValues{{{0, SIZE_MAX}, {0, SIZE_MAX}}};
/// Returns the values that both sides have. Throws Error if they have different ones.
PYCOMM_API std::pair<size_t, size_t> shared_span(const Spans& spans, size_t old, size_t fresh);

/// Feedback of one tensor; without memory there is none.
struct Feedback {
  Kind kind = Kind::residual;
  Storage storage = Storage::float32;
  float decay = 0.0f;
  Memory error;     ///< e or v
  Memory momentum;  ///< u

  explicit operator bool() const { return error || momentum; }
  /// Returns the feedback of `count` values from `offset` on, a multiple of kBlock or 0, in row
  /// `row` of rows of `numel`. Throws Error if they have no memory.
  Feedback at(size_t row, size_t numel, size_t offset, size_t count) const;
};

/// Float32 copies of the working data of one encode, in memory that the next one uses again: the
/// pages of fresh memory cost more than the encode.
class Scratch {
 public:
  /// Returns one of kPlaces, of at least `numel` values; its previous contents are lost.
  PYCOMM_API float* get(size_t place, size_t numel);
  static constexpr size_t kPlaces = 5;
  /// A place that encode() does not use, for data that its callers prepare.
  static constexpr size_t kFloat32 = 4;

 private:
  struct Place {
    std::unique_ptr<float[]> floats;
    size_t numel = 0;
  };
  std::array<Place, kPlaces> places_;
};

/// True if kernels on a GPU encode with feedback of this kind, whatever its storage.
PYCOMM_API bool has_kernels(Kind kind);
/// Returns the bytes of the stream's scratch memory that encode() takes on a GPU, before what the
/// codec needs.
PYCOMM_API size_t scratch_bytes(const Codec& codec, const Feedback& feedback, size_t numel);

/// Encodes with `feedback` for exactly the values of args.in; `args` has no residuals.
PYCOMM_API void encode(const Codec& codec, const Feedback& feedback, EncodeArgs args,
                       Scratch& scratch);

}  // namespace pycomm::feedback
