// The process in which a module runs: loads the library, and hands over to it (serve.cpp).
//
//   runner LIBRARY SOCKET      exit status 3: the library cannot be loaded, and stderr says why
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

int main(int count, char** words) {
    if (count != 3) return 2;
    void* library = dlopen(words[1], RTLD_NOW | RTLD_LOCAL);
    void* serve = library ? dlsym(library, "simt_serve") : nullptr;
    if (!serve) {
        fprintf(stderr, "%s\n", dlerror());
        return 3;
    }
    return ((int (*)(void*, int))serve)(library, atoi(words[2]));
}
