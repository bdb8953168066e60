// Drop files, each as its name and its bytes in base64, on the page.
(files) => {
  const dataTransfer = new DataTransfer();
  for (const [name, data] of files) {
    dataTransfer.items.add(new File([Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0))], name));
  }
  for (const kind of ["dragenter", "dragover", "drop"]) {
    document.body.dispatchEvent(new DragEvent(kind, { bubbles: true, cancelable: true, dataTransfer }));
  }
};
