#include "weft/comm/ucx_plugin.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <filesystem>

#include "weft/comm/settings.h"

namespace weft::comm {
namespace {

struct Plugin {
  decltype(&weft_ucx_link_1) make = nullptr;
  std::string why_not;
};

std::filesystem::path beside_this_library() {
  Dl_info here{};
  dladdr(reinterpret_cast<void*>(&why_no_ucx), &here);
  return std::filesystem::path(here.dli_fname ? here.dli_fname : "").parent_path() / "libweft_ucx.so";
}

Plugin load() {
  const auto path = beside_this_library();
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

std::string why_no_ucx() {
  if (!ucx_trusted())
    return "WEFT_UCX_TRUSTED is not 1: anyone who reaches UCX's TCP port can end a rank. Set it where only the hosts "
           "of "
           "this job do";
  const auto path = beside_this_library();
  if (!std::filesystem::exists(path)) return "weft was built without UCX: there is no " + path.string();
  return "";
}

std::string load_ucx() {
  auto why_not = why_no_ucx();
  return why_not.empty() ? plugin().why_not : why_not;
}

std::unique_ptr<Link> make_ucx_link(const UcxOptions& options) {
  const auto why_not = load_ucx();
  TORCH_CHECK_NOT_IMPLEMENTED(why_not.empty(), "No link over UCX for group '", options.group, "': ", why_not, ".");
  return std::unique_ptr<Link>(plugin().make(options));
}

}  // namespace weft::comm
