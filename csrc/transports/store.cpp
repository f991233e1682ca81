// Stores that need no server: a map for threads, a folder for processes.
#include "transports/store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <map>
#include <mutex>
#include <thread>

#include "core/error.h"
#include "core/interrupt.h"
#include "core/sha256.h"
#include "transports/fd.h"
#include "transports/seal.h"

namespace pycomm {
namespace {

class LocalStore final : public Store {
 public:
  LocalStore(bool appends, size_t most_bytes) : appends_(appends), most_bytes_(most_bytes) {}

  void set(const std::string& key, const std::string& value) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto kept = values_.find(key);
    if (kept != values_.end()) bytes_ -= kept->second.size();
    if (takes(value.size() + (kept == values_.end() ? key.size() : 0))) values_[key] = value;
  }

  std::optional<std::string> find(const std::string& key) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (bytes_ > most_bytes_) throw Error("store: the ranks have published too much");
    const auto found = values_.find(key);
    if (found == values_.end()) return std::nullopt;
    return found->second;
  }

  bool appends() const override { return appends_; }

  void append(const std::string& key, const std::string& value) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (takes(key.size() + value.size())) values_[key] += value;
  }

  int64_t count(const std::string& key) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return ++counts_[key];
  }

  void erase(const std::string& key) override {
    std::lock_guard<std::mutex> lock(mutex_);
    values_.erase(key);
  }

 private:
  bool takes(size_t bytes) {
    bytes_ += bytes;
    return bytes_ <= most_bytes_;
  }

  const bool appends_;
  const size_t most_bytes_;
  std::mutex mutex_;
  size_t bytes_ = 0;  ///< of keys and values, those that were erased included
  std::map<std::string, std::string> values_;
  std::map<std::string, int64_t> counts_;
};

[[noreturn]] void throw_errno(const std::string& what, const std::string& path) {
  throw Error("store: cannot " + what + " " + path + ": " + error_text(errno) +
              "; check the folder and its rights");
}

/// Opens a file; takes `folder` as openat() does (AT_FDCWD included). A symbolic link is no file of
/// ours.
Fd open_file(int folder, const std::string& path, int flags) {
  return Fd(::openat(folder, path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
}

// Keys may hold any character and be long, but names of files may not: characters other than
// letters, digits, '-' and '_' are written as %XX, and a hash takes the place of what is too long.
// '+' and '.' cannot occur in an encoded key, so no two keys collide.
std::string file_name(const std::string& key) {
  constexpr size_t kLongest = 180;
  constexpr char kHex[] = "0123456789abcdef";
  std::string name;
  for (const char c : key) {
    const auto byte = static_cast<unsigned char>(c);
    const bool plain = (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z') ||
                       (byte >= '0' && byte <= '9') || byte == '-' || byte == '_';
    if (plain) {
      name += c;
    } else {
      name += {'%', kHex[byte >> 4], kHex[byte & 15]};
    }
  }
  if (name.size() > kLongest) {
    const Digest digest = sha256(key);
    name = name.substr(0, kLongest / 2) + "+" + hexadecimal({digest.data(), digest.size()});
  }
  return name + ".value";
}

// A store in a folder. Ranks take addresses and secrets from it, so nobody else may write here: the
// check is made on the open folder, and all files are reached through it, whatever becomes of its
// name. Who may write to the folder above could put another folder in its place before that.
class FileStore final : public Store {
 public:
  explicit FileStore(const std::string& folder)
      : folder_(without_slashes(folder) + "/"), opened_(open(without_slashes(folder))) {
    struct stat info = {};
    if (::fstat(opened_.get(), &info) != 0) throw_errno("look at the folder", folder_);
    check_owner(info, folder_);
    if ((info.st_mode & kOthersWrite) != 0) {
      throw Error("store: other users may write to " + folder_ + " (mode " + mode_text(info) +
                  "), and could pass for ranks; run chmod go-w on it, or name a folder that does "
                  "not exist yet");
    }
  }

  void set(const std::string& key, const std::string& value) override {
    static std::atomic<uint64_t> serial{0};
    const std::string path = file_name(key);
    const std::string part = path + "." + host() + "-" + std::to_string(::getpid()) + "-" +
                             std::to_string(serial++) + ".part";
    try {
      write(part, value);
      // Readers see the whole value or none.
      if (::renameat(opened_.get(), part.c_str(), opened_.get(), path.c_str()) != 0) {
        throw_errno("rename", folder_ + part);
      }
    } catch (const Error&) {  // a full disk
      ::unlinkat(opened_.get(), part.c_str(), 0);
      throw;
    }
  }

  std::optional<std::string> find(const std::string& key) override { return read(file_name(key)); }

 private:
  static constexpr mode_t kOthersWrite = S_IWGRP | S_IWOTH;

  // A path that ends in a slash would follow a link.
  static std::string without_slashes(std::string folder) {
    while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
    return folder.empty() ? "." : folder;
  }
  static std::string mode_text(const struct stat& info) {
    char mode[8];
    std::snprintf(mode, sizeof mode, "%03o", static_cast<unsigned>(info.st_mode & 0777));
    return mode;
  }
  static Fd open(const std::string& folder) {
    make_folders(folder + "/");
    const size_t slash = folder.rfind('/');
    const std::string above = slash == std::string::npos ? "." : folder.substr(0, slash + 1);
    const std::string name = folder == "/" ? "." : folder.substr(slash + 1);
    const Fd parent(::open(above.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!parent) throw_errno("open the folder", above);
    check_parent(parent.get(), above);
    // Children that are forked later may be ranks, and have this store.
    Fd opened(::openat(parent.get(), name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW),
              Fd::Scope::children);
    struct stat info = {};
    if (!opened && ::fstatat(parent.get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0 &&
        S_ISLNK(info.st_mode)) {
      throw Error("store: " + folder +
                  " is a link, which whoever made it can turn elsewhere; name the folder itself");
    }
    if (!opened) throw_errno("open the folder", folder);
    return opened;
  }
  // In a sticky folder, as /tmp, others can neither rename nor remove what is ours.
  static void check_parent(int folder, const std::string& path) {
    struct stat info = {};
    if (::fstat(folder, &info) != 0) throw_errno("look at the folder", path);
    const bool known = info.st_uid == ::geteuid() || info.st_uid == 0;
    const bool open = (info.st_mode & kOthersWrite) != 0 && (info.st_mode & S_ISVTX) == 0;
    if (known && !open) return;
    throw Error("store: " + path + ", in which the folder of the store is, " +
                (known ? "can be written by other users (mode " + mode_text(info) + ")"
                       : "belongs to user " + std::to_string(info.st_uid)) +
                ", who could put another folder in its place; " +
                (known ? "run chmod go-w on it, or name" : "name") + " a folder elsewhere");
  }
  static void check_owner(const struct stat& info, const std::string& path) {
    if (info.st_uid == ::geteuid()) return;
    throw Error("store: " + path + " belongs to user " + std::to_string(info.st_uid) +
                ", and this rank is user " + std::to_string(::geteuid()) +
                ": it could pass for ranks; name a folder of your own");
  }
  void write(const std::string& path, const std::string& value) const {
    const Fd file = open_file(opened_.get(), path, O_WRONLY | O_CREAT | O_EXCL);
    if (!file) throw_errno("create", folder_ + path);
    for (size_t done = 0; done < value.size();) {
      const ssize_t n = ::write(file.get(), value.data() + done, value.size() - done);
      if (n < 0 && errno != EINTR) throw_errno("write", folder_ + path);
      done += n > 0 ? static_cast<size_t>(n) : 0;
    }
  }
  std::optional<std::string> read(const std::string& path) const {
    const Fd file = open_file(opened_.get(), path, O_RDONLY);
    struct stat info = {};
    if (!file || ::fstat(file.get(), &info) != 0) {
      if (errno == ENOENT) return std::nullopt;
      throw_errno("read", folder_ + path);
    }
    check_owner(info, folder_ + path);  // it may date from a time when others could write here
    if (!S_ISREG(info.st_mode)) throw Error("store: " + folder_ + path + " is no file");
    std::string value;
    char buffer[4096];
    for (;;) {
      const ssize_t n = ::read(file.get(), buffer, sizeof buffer);
      if (n == 0) return value;
      if (n > 0) {
        value.append(buffer, static_cast<size_t>(n));
      } else if (errno != EINTR) {
        throw_errno("read", folder_ + path);
      }
    }
  }

  // Makes every folder above `path`.
  static void make_folders(const std::string& path) {
    for (size_t slash = path.find('/', 1); slash != std::string::npos;
         slash = path.find('/', slash + 1)) {
      const std::string folder = path.substr(0, slash);
      if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
        throw_errno("make the folder", folder);
      }
    }
  }

  // Names this host, because process ids repeat between the hosts of a shared folder.
  static std::string host() {
    char name[256] = {};
    ::gethostname(name, sizeof name - 1);
    return std::string(name).substr(0, 24);
  }

  const std::string folder_;
  const Fd opened_;
};

}  // namespace

std::string Store::get(const std::string& key, Deadline deadline) {
  auto pause = std::chrono::microseconds(50);
  for (InterruptPoll interrupts;; interrupts.check()) {
    const bool last = deadline.expired();
    if (auto value = find(key)) return std::move(*value);
    if (last) {
      throw Timeout("store: nobody set the key \"" + key + "\" within " +
                    std::to_string(deadline.limit().count()) + " ms");
    }
    std::this_thread::sleep_for(
        std::min<std::chrono::microseconds>(pause, deadline.left() + Milliseconds(1)));
    pause = std::min<std::chrono::microseconds>(pause * 2, Milliseconds(20));
  }
}

std::shared_ptr<Store> make_local_store(bool appends, size_t most_bytes) {
  return std::make_shared<LocalStore>(appends, most_bytes);
}

std::shared_ptr<Store> make_file_store(const std::string& folder) {
  return std::make_shared<FileStore>(folder);
}

}  // namespace pycomm
