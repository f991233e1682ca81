// Notice: why a rank has ended its group, in the bytes in which every medium carries it: shared
// memory, the control page of a device, the store, and TCP.
#pragma once
#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/types.h"

namespace pycomm {

struct PYCOMM_API Notice {
  /// The type of the error that the other ranks raise.
  enum class Kind : uint8_t { error, timeout, mismatch, lost };
  /// The room of a notice in memory that ranks share and in TCP's messages. A longer text is cut.
  static constexpr size_t kBytes = 1000;
  /// The most entries of `ranks` that an encoded notice has.
  static constexpr size_t kMaxRanks = 128;

  Kind kind = Kind::error;
  int from = -1;           ///< the rank that has ended the group
  int rank = -1;           ///< lost: the rank that the text names
  std::vector<int> ranks;  ///< lost: all that are gone, ascending; timeout: those waited for
  std::string text;

  /// Writes at most `room` bytes, which must hold all but the text, and returns their number.
  ///
  ///   u8 kind, u8 0, u16 count of ranks, i32 from, i32 rank, u32 bytes of text, i32 ranks[], text
  size_t encode(uint8_t* out, size_t room) const noexcept;
  /// Returns the notice, whole.
  std::string encoded() const;
  /// Reads what encode() wrote; bytes after it are ignored. Bytes that are no notice become one of
  /// kind error, whose text says so.
  static Notice decode(Span<const uint8_t> bytes);
};

/// A rank has ended the group. Transports throw it; at the face of a group it becomes an error of
/// the notice's kind.
class PYCOMM_API Aborted : public Error {
 public:
  /// The text is "rank 3 <did>: ", then that of the notice.
  explicit Aborted(Notice notice, const std::string& did = "aborted the group");
  Notice notice;
};

/// Returns a notice of kind error, without its text if no memory is left for that.
PYCOMM_API Notice plain_notice(const std::string& text, int from) noexcept;

/// Returns the notice by which rank `from` tells its peers of an error. An error that comes from a
/// notice becomes that notice again.
PYCOMM_API Notice to_notice(const std::exception_ptr& error, int from);

/// Returns the error of a notice's kind, with its text. Every PeerLost of a group is made here.
PYCOMM_API std::exception_ptr error_of(const Notice& notice);
/// Throws it.
[[noreturn]] PYCOMM_API void throw_error(const Notice& notice);

/// Returns the notice of a rank that is gone. `how` goes on after its name: "died: ...". `where`:
/// its address, if it has one.
PYCOMM_API Notice lost(int rank, const std::string& how, const std::string& where = "");

/// Returns the error that a notice stands for: for Aborted an exception of the notice's kind, with
/// the text of the rank that made it. Any other error, also Aborted of kind error, is returned as
/// it is.
PYCOMM_API std::exception_ptr from_notice(const std::exception_ptr& error);

}  // namespace pycomm
