// SPDX-License-Identifier: Apache-2.0
// Tables that sort and filter in place, and a notice over pages that are no longer fresh. Pages are complete without it.
"use strict";

const orders = new Map();
let filterText = "";
let answered = new Date();

function valueOf(row, column) {
  const cell = row.cells[column];
  const key = cell.dataset.sort ?? cell.textContent.trim();
  const number = Number(key.replaceAll(",", ""));
  return key !== "" && !Number.isNaN(number) ? number : key;
}

function compare(left, right) {
  if (typeof left === "number" && typeof right === "number") return left - right;
  return String(left).localeCompare(String(right));
}

function applyOrder(table, index) {
  const order = orders.get(index);
  if (!order) return;
  const body = table.tBodies[0];
  const rows = [...body.rows];
  rows.sort((a, b) => order.sign * compare(valueOf(a, order.column), valueOf(b, order.column)));
  body.append(...rows);
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    if (column === order.column) head.setAttribute("aria-sort", order.sign > 0 ? "ascending" : "descending");
    else head.removeAttribute("aria-sort");
  });
}

function applyFilter() {
  const wanted = filterText.toLowerCase();
  for (const row of document.querySelectorAll("table[data-sortable] tbody tr")) {
    row.hidden = wanted !== "" && !row.textContent.toLowerCase().includes(wanted);
  }
}

function prepare() {
  document.querySelectorAll("table[data-sortable]").forEach((table, index) => {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      if (head.querySelector("button") || head.textContent.trim() === "") return;
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      button.addEventListener("click", () => {
        const order = orders.get(index);
        orders.set(index, { column, sign: order && order.column === column ? -order.sign : 1 });
        applyOrder(table, index);
      });
      head.replaceChildren(button);
    });
    applyOrder(table, index);
  });
  for (const input of document.querySelectorAll("input[data-filter]")) {
    input.value = filterText;
    input.addEventListener("input", () => {
      filterText = input.value;
      applyFilter();
    });
  }
  applyFilter();
}

// Old states must not look like current ones.
function showStale() {
  const notice = document.getElementById("stale");
  notice.querySelector("time").textContent = answered.toLocaleString(document.documentElement.lang);
  notice.hidden = false;
}

document.addEventListener("DOMContentLoaded", prepare);
document.addEventListener("htmx:afterSwap", () => {
  answered = new Date();
  document.getElementById("stale").hidden = true;
  prepare();
});
document.addEventListener("htmx:sendError", showStale);
document.addEventListener("htmx:responseError", (event) => {
  // The session has ended: the page itself leads to the login, and back.
  if (event.detail.xhr.status === 401) location.reload();
  else showStale();
});
// A refresh does not take away what somebody types or reads with the keyboard.
document.addEventListener("htmx:beforeRequest", (event) => {
  const focused = document.activeElement;
  if (document.hidden || (focused && focused !== document.body && event.detail.elt.contains(focused))) {
    event.preventDefault();
  }
});
