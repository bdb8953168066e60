// Drop files, each as its name and its bytes in base64, on the page; return whether the browser would do as it does with
// files that no page takes: go on with the pointer, then open them.
(files) => {
  const dataTransfer = new DataTransfer();
  for (const [name, data] of files) {
    dataTransfer.items.add(new File([Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0))], name));
  }
  const dispatch = (kind) => document.body.dispatchEvent(new DragEvent(kind, { bubbles: true, cancelable: true, dataTransfer }));
  dispatch("dragenter");
  return [dispatch("dragover"), dispatch("drop")];
};
