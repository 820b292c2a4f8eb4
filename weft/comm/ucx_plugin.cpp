#include "weft/comm/ucx_plugin.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>

#include "weft/comm/ucx/devices.h"

namespace weft::comm {
namespace {

struct Plugin {
  decltype(&weft_ucx_link_1) make = nullptr;
  std::string why_not;
};

/// Sets a variable of the environment for a moment, unless it is set. UCX reads these two when it is loaded; by default
/// it takes over signals, and patches the C library to see memory come and go, of which sockets need nothing.
class Unless {
 public:
  Unless(const char* name, const char* value) : name_(std::getenv(name) ? nullptr : name) {
    if (name_) setenv(name_, value, 0);
  }
  Unless(const Unless&) = delete;
  Unless& operator=(const Unless&) = delete;
  ~Unless() {
    if (name_) unsetenv(name_);
  }

 private:
  const char* name_;
};

std::filesystem::path beside_this_library() {
  Dl_info here{};
  dladdr(reinterpret_cast<void*>(&why_no_ucx), &here);
  return std::filesystem::path(here.dli_fname ? here.dli_fname : "").parent_path() / "libweft_ucx.so";
}

Plugin load() {
  const auto path = beside_this_library();
  if (!std::filesystem::exists(path)) return {nullptr, "weft was built without UCX: there is no " + path.string()};
  const Unless crashes("UCX_HANDLE_ERRORS", "none");  // they stay with the program's own signal handlers
  const Unless hooks("UCX_MEM_EVENTS", ucx::has_rdma() ? "y" : "n");
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) return {nullptr, dlerror()};  // names the missing one, e.g. libucp.so.0
  auto make = reinterpret_cast<decltype(&weft_ucx_link_1)>(dlsym(library, "weft_ucx_link_1"));
  if (!make) return {nullptr, path.string() + " is of another version of weft"};
  return {make, ""};
}

const Plugin& plugin() {
  static const Plugin loaded = load();
  return loaded;
}

}  // namespace

const std::string& why_no_ucx() { return plugin().why_not; }

std::unique_ptr<Link> make_ucx_link(const UcxOptions& options) {
  TORCH_CHECK_NOT_IMPLEMENTED(plugin().make, "No link over UCX for group '", options.group, "': ", why_no_ucx());
  return std::unique_ptr<Link>(plugin().make(options));
}

}  // namespace weft::comm
