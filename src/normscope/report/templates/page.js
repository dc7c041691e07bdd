"use strict";
(() => {
  const tip = document.getElementById("tip");
  const cursors = document.querySelectorAll(".cursor");
  // The page's own box takes over from the browser's slow tooltips.
  for (const title of document.querySelectorAll("svg title")) {
    title.parentNode.tip = title.textContent;
    title.remove();
  }
  const owner = (node) => {
    while (node && node !== document && !node.tip) node = node.parentNode;
    return node && node.tip ? node : null;
  };
  const mark = (node) => {
    const area = node && (node.matches(".track .hit") ? node : node.matches(".row, .rung") && node.querySelector(".panel, .slot"));
    for (const cursor of cursors) {
      cursor.setAttribute("y", area ? area.getAttribute("y") : 0);
      cursor.setAttribute("height", area ? area.getAttribute("height") : 0);
    }
  };
  const show = (event) => {
    const node = owner(event.target);
    tip.hidden = !node;
    mark(node);
    if (!node) return;
    tip.textContent = node.tip;
    const box = tip.getBoundingClientRect();
    const left = event.clientX + 16 + box.width > innerWidth ? event.clientX - 16 - box.width : event.clientX + 16;
    const top = event.clientY + 16 + box.height > innerHeight ? event.clientY - 8 - box.height : event.clientY + 16;
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = Math.max(4, top) + "px";
  };
  document.addEventListener("pointermove", show);
  document.addEventListener("pointerdown", show);

  // A card and its bracket light up together.
  for (const one of document.querySelectorAll("[data-f]")) {
    const both = document.querySelectorAll(`[data-f="${one.dataset.f}"]`);
    one.addEventListener("pointerenter", () => both.forEach((node) => node.classList.add("lit")));
    one.addEventListener("pointerleave", () => both.forEach((node) => node.classList.remove("lit")));
  }

  const filter = document.getElementById("filter");
  if (filter) {
    filter.parentNode.hidden = false;
    const tables = [...document.querySelectorAll("details.table")];
    const wasOpen = tables.map((table) => table.open);
    filter.addEventListener("input", () => {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      let total = 0;
      tables.forEach((table, t) => {
        const head = [...table.querySelectorAll("thead th")];
        const keep = head.map((th, i) => i === 0 || words.some((w) => th.textContent.toLowerCase().includes(w)));
        const columns = keep.slice(1).some(Boolean) ? keep : head.map(() => true);
        const rest = words.filter((w) => !head.slice(1).some((th) => th.textContent.toLowerCase().includes(w)));
        let found = 0;
        head.forEach((th, i) => (th.hidden = !columns[i]));
        for (const row of table.querySelectorAll("tbody tr")) {
          const site = row.cells[0].textContent.toLowerCase();
          row.hidden = !rest.every((w) => site.includes(w));
          found += !row.hidden;
          [...row.cells].forEach((cell, i) => (cell.hidden = !columns[i]));
        }
        table.hidden = found === 0;
        table.open = words.length ? found > 0 : wasOpen[t];
        total += found;
      });
      document.getElementById("found").textContent = words.length ? total + " rows" : "";
    });
  }

  // On paper everything that a finding says is open.
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll(".card details")) details.open = true;
  });
})();
